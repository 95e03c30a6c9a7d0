# References of tests/inference: pooled fits by lme4, lmerTest and survival.
#   Rscript tests/inference/references.R DATA OUT.json
# DATA holds inference/ and multisite/ (docs/how-to/from-lme4.md names where the tables come from).
suppressMessages({
  library(lme4)
  library(lmerTest)
  library(survival)
  library(jsonlite)
})
arguments <- commandArgs(trailingOnly = TRUE)
data <- arguments[1]
table_of <- function(name) read.csv(file.path(data, name), check.names = FALSE, stringsAsFactors = TRUE)
control <- glmerControl(optimizer = "bobyqa", optCtrl = list(maxfun = 2e5, rhobeg = 2e-4, rhoend = 2e-9), tolPwrss = 1e-12)
tight <- lmerControl(optimizer = "bobyqa", optCtrl = list(maxfun = 2e5, rhoend = 2e-10))

of_mixed <- function(model, formula, family, file, site = NULL, profile = FALSE) {
  rows <- coef(summary(model))
  spread <- as.data.frame(VarCorr(model))
  out <- list(
    file = file, formula = formula, family = family, terms = rownames(rows), estimate = unname(rows[, "Estimate"]),
    error = unname(rows[, "Std. Error"]), df = if ("df" %in% colnames(rows)) unname(rows[, "df"]) else NULL,
    p = unname(rows[, ncol(rows)]), loglik = as.numeric(logLik(model)), aic = AIC(model), bic = BIC(model),
    rows = nobs(model), spread = I(spread$sdcor)
  )
  modes <- as.data.frame(ranef(model, condVar = TRUE))
  first <- head(modes, 3)
  out$modes <- list(site = as.character(first$grp), term = as.character(first$term), value = first$condval, error = first$condsd)
  if (profile) out$profile <- unname(as.matrix(confint(model, parm = "theta_", quiet = TRUE)))
  out
}
linear <- function(file, text, r = text, reml = TRUE, profile = FALSE) {
  model <- lmerTest::lmer(as.formula(r), table_of(file), REML = reml, control = tight)
  of_mixed(model, text, "gaussian", file, profile = profile) |> c(list(reml = reml))
}
counts <- function(file, text, family, r = text, profile = FALSE, start = NULL) {
  d <- table_of(file)
  first <- glmer(as.formula(r), d, family)
  model <- update(first, start = list(theta = getME(first, "theta"), fixef = fixef(first)), control = control)
  of_mixed(model, text, family, file, profile = profile)
}

out <- list()
sleep <- "inference/sleepstudy.csv"
out$sleepstudy <- linear(sleep, "Reaction ~ Days + (1 + Days | Subject)", profile = TRUE)
out$sleepstudy_ml <- linear(sleep, "Reaction ~ Days + (1 + Days | Subject)", reml = FALSE)
out$sleepstudy_uncorrelated <- linear(sleep, "Reaction ~ Days + (1 + Days || Subject)", profile = TRUE)
out$exam <- linear("multisite/exam.csv", "normexam ~ standLRT + (1 + standLRT | school)", reml = FALSE)
out$exam_reml <- linear("multisite/exam.csv", "normexam ~ standLRT + sex + schgend + (1 + standLRT | school)")
out$exam_none <- linear("multisite/exam.csv", "normexam ~ standLRT + (1 | school)", reml = FALSE)
out$oxboys <- linear("multisite/oxboys.csv", "height ~ age + I(age**2) + (1 + age | Subject)",
                     "height ~ age + I(age^2) + (1 + age | Subject)")
out$math <- linear("multisite/math.csv", "MathAch ~ SES * Sector + MEANSES + Sex + (1 + SES | School)")
out$cbpp <- counts("inference/cbpp.csv", "cbind(incidence, size - incidence) ~ factor(period) + (1 | herd)", "binomial",
                   profile = TRUE)
out$contraception <- counts("multisite/contraception.csv", "use ~ age + I(age**2) + urban + livch + (1 + urban | district)",
                            "binomial", "use ~ age + I(age^2) + urban + livch + (1 + urban | district)")
out$verbagg <- counts("inference/verbagg.csv", "r2 ~ Anger + Gender + btype + situ + (1 | id)", "binomial")
out$epilepsy <- counts("inference/epilepsy.csv", "seizure.rate ~ log(base) + log(age) + treatment + (1 | subject)", "poisson")

patients <- table_of("inference/tcga_brca.csv")
covariates <- names(patients)[1:39]
right <- paste(sprintf("`%s`", covariates), collapse = " + ")
cox <- suppressWarnings(coxph(as.formula(paste("Surv(T, E) ~", right, "+ strata(region)")), patients, ties = "efron",
                              control = coxph.control(eps = 1e-12, iter.max = 60)))
out$tcga <- list(
  file = "inference/tcga_brca.csv", formula = paste("Surv(T, E) ~", right), family = "cox", site = "region",
  terms = covariates, estimate = unname(coef(cox)), error = unname(sqrt(diag(vcov(cox)))), loglik = cox$loglik[2],
  null = cox$loglik[1], rows = cox$n, events = cox$nevent
)
few <- c("age_at_index", "race_asian", "ajcc_pathologic_n_N1", "ajcc_pathologic_n_N2")
right <- paste(sprintf("`%s`", few), collapse = " + ")
cox <- coxph(as.formula(paste("Surv(T, E) ~", right, "+ strata(region)")), patients, ties = "efron",
             control = coxph.control(eps = 1e-12, iter.max = 60))
out$tcga_few <- list(
  file = "inference/tcga_brca.csv", formula = paste("Surv(T, E) ~", right), family = "cox", site = "region",
  terms = few, estimate = unname(coef(cox)), error = unname(sqrt(diag(vcov(cox)))), loglik = cox$loglik[2],
  null = cox$loglik[1], rows = cox$n, events = cox$nevent
)
write_json(out, arguments[2], digits = NA, auto_unbox = TRUE, pretty = TRUE, na = "null")
